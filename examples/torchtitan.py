"""torchtitan: its own trainer, which finds Replicator's checkpoint manager by `--module`.

What `python -m torchtitan.train` does, on a CPU and with a model that fits there. Of your own job only two options
change: `--module replicator.integrations.torchtitan --config llama3.llama3_8b`.
"""

from __future__ import annotations

from typing import Any

from examples import _torchtitan_on_cpu, report  # isort: skip  # before anything of torchtitan
import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer


def main() -> None:
    options = report.options(__doc__)
    config = ConfigManager().parse_args(
        [
            *("--module", "replicator.integrations.torchtitan"),
            *("--config", f"{_torchtitan_on_cpu.__name__}.debugmodel"),
            *("--training.steps", str(options.steps)),
            *("--checkpoint.interval", str(options.save_every)),
            *("--checkpoint.wait-for", "protected"),
        ]
    )
    trainer: Trainer = config.build()
    if trainer.checkpointer.load():  # `train` would do that itself
        report.recovered(trainer.step, state_of(trainer))
    trainer.train()
    trainer.close()
    report.saved(trainer.step, state_of(trainer))
    dist.destroy_process_group()


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that has to come back."""
    return {
        "model": {name: value for part in trainer.model_parts for name, value in part.state_dict().items()},
        "optimizer": trainer.optimizers.state_dict(),
        "learning_rate": trainer.lr_schedulers.state_dict(),
        "data": trainer.dataloader.state_dict(),
        "trainer": trainer.state_dict(),
    }


if __name__ == "__main__":
    main()
