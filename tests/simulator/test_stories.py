"""What the simulator found, told as a story of its own: these fail without what was mended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from replicator.decide.types import Manifest
from replicator.ids import CheckpointContainerId, ContainerVersion

from .faults import Faults
from .history import Restored
from .job import Incarnation
from .node import SimNode
from .world import Shape, Story, World, run_seed


async def start(world: World) -> None:
    for node in world.nodes:
        node.start()
    await asyncio.sleep(0.5)


async def run(world: World, nodes: Sequence[SimNode], steps: int) -> Restored:
    """One incarnation of the first job that ends well; what it restored."""
    outcome = await Incarnation(world.jobs[0], nodes, steps).run()
    assert outcome is None, outcome
    return [event for event in world.jobs[0].history.events if isinstance(event, Restored)][-1]


def tell(story: Story, shape: Shape) -> None:
    lines: list[str] = []
    result = run_seed(1, tell=lines.append, story=story, shape=shape)
    assert not result.problem, "\n".join([result.problem, *lines[-40:]])


def test_a_bad_copy_that_nobody_else_has_is_offered_once_and_then_the_step_before_is_restored() -> None:
    """F01: the receiver finds the bits wrong, the holder did not know, and every plan named it as the only source."""

    async def story(world: World) -> None:
        first, second = world.nodes
        job = world.jobs[0]
        job.objects, job.write_fails = (1,), 0.0
        await start(world)
        await run(world, (first, second), 2)
        assert first.store is not None
        newest = max(first.store.versions(), key=lambda version: version.container.step)
        assert newest.container == CheckpointContainerId(job.name, 1)
        info = next(iter(first.store.objects(newest).values()))
        Faults(world).flip(first, info)
        # Now the rank that loads the object is on the other node.
        restored = await run(world, (second, first), 0)
        assert restored.version is not None
        assert restored.version.container.step == 0
        assert first.store.usage().quarantined_objects == 1

    for lane in ("grpc", "bulk"):
        tell(story, Shape(nodes=2, replicas=0, lane=lane))


def test_an_agent_that_moved_while_a_peer_was_cut_off_is_found_when_the_peer_is_back() -> None:
    """F34: it told everybody where it is, once, at its start; who was away then looked for it at the old address."""

    async def story(world: World) -> None:
        await start(world)
        await run(world, world.nodes, 1)
        moved, away = world.nodes[0], world.nodes[1]
        world.network.partition({away.name}, {node.name for node in world.nodes}, both_ways=True)
        moved.crash()
        agent = moved.start(other_port=True)
        await asyncio.sleep(3 * world.deadline_s)
        assert away.agent is not None
        peers, job = away.agent.core.peers, world.jobs[0].name
        assert peers.resolve(job, moved.name).grpc_address != agent.address.grpc_address
        world.network.heal()
        await asyncio.sleep(3 * world.deadline_s)
        assert peers.resolve(job, moved.name) == agent.address

    tell(story, Shape(nodes=3))


def test_an_owner_that_lost_its_objects_does_not_report_that_they_are_safe() -> None:
    """F49: without replicas it had no buddy to ask and said yes, and the step before, which could be restored, went."""

    async def story(world: World) -> None:
        coordinator, owner = world.nodes
        job = world.jobs[0]
        job.objects, job.write_fails, job.waits_protected = (1,), 0.0, 0.0
        await start(world)
        await run(world, world.nodes, 1)
        await asyncio.sleep(1)
        ask = world.oracle.commit_asked

        def cut_and_ask(manifest: Manifest) -> None:
            world.network.partition({owner.name}, {coordinator.name}, both_ways=False)
            ask(manifest)

        world.oracle.commit_asked = cut_and_ask  # type: ignore[method-assign]
        saved = await run(world, world.nodes, 1)
        assert saved.version is not None
        owner.lose()
        world.network.heal()
        owner.start()
        await asyncio.sleep(1)
        restored = await run(world, world.nodes, 0)
        # Its other half is gone as well, but not because it was taken for superseded.
        assert restored.version is None
        await asyncio.sleep(3 * world.deadline_s)
        assert coordinator.store is not None
        steps = {
            version.container.step: coordinator.store.is_protected(version)
            for version in coordinator.store.versions(job.name)
        }
        assert steps == {0: True, 1: False}

    tell(story, Shape(nodes=2, replicas=0, keep_last=1))


def test_saves_that_failed_are_dropped_once_however_often_nodes_are_told_of_them() -> None:
    async def story(world: World) -> None:
        world.jobs[0].write_fails = 1.0
        world.jobs[0].objects = (1,)
        await start(world)
        await run(world, world.nodes, 6)
        await asyncio.sleep(world.deadline_s)
        for node in world.nodes:
            assert node.agent is not None
            counters = node.agent.core.counters
            assert 0 < counters.get("containers_dropped") == counters.get("containers_abandoned") <= 6

    tell(story, Shape(nodes=2))


def test_a_node_whose_disk_is_full_before_it_ever_took_a_copy_says_so_and_takes_the_next_ones() -> None:
    """It could not make the file that says it is alive, and logged its own trace as if nobody had thought of that."""

    async def story(world: World) -> None:
        full, job = world.nodes[1], world.jobs[0]
        job.objects, job.write_fails, job.model_only, job.waits_protected = (3,), 0.0, 0.0, 1.0
        await start(world)
        begun = world.oracle.begun

        def fill(version: ContainerVersion, members: Iterable[str], replicas: int) -> None:
            full.full = True
            begun(version, members, replicas)

        world.oracle.begun = fill  # type: ignore[method-assign]
        await run(world, world.nodes, 1)
        world.oracle.begun = begun  # type: ignore[method-assign]
        assert world.faults["disk full"] > 1
        full.full = False
        await run(world, world.nodes, 1)
        assert [one.protected for one in world.oracle.containers.values()] == [False, True]

    tell(story, Shape(nodes=2))


def test_saves_of_the_model_alone_supersede_each_other_and_never_what_a_job_goes_on_from() -> None:
    """F43: with room for one checkpoint kept, the last saves of a run would have driven out the one to go on from."""

    async def story(world: World) -> None:
        job = world.jobs[0]
        job.objects, job.write_fails, job.model_only, job.waits_protected = (1,), 0.0, 0.0, 1.0
        await start(world)
        await run(world, world.nodes, 1)
        job.model_only = 1.0
        restored = await run(world, world.nodes, 3)
        assert restored.version is not None
        await asyncio.sleep(world.deadline_s)
        for node in world.nodes:
            assert node.store is not None
            assert [version.container.step for version in sorted(node.store.versions())] == [0, 3]
        again = await run(world, world.nodes, 0)
        assert again.version == restored.version
        assert world.oracle.checked["the model alone never supersedes what a job can go on from"] == 0

    tell(story, Shape(nodes=2, keep_last=1))
