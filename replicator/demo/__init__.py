"""`replicator-admin demo`: a training job that loses a node on this machine, and goes on bit for bit.

`cli` the options; `scenario` the story, played on a `replicator.local_cluster`; `events` what ranks report; `report`
what is printed; `train` the job itself, the only part that imports torch, in processes of its own.
"""
