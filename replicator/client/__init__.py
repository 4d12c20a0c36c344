"""What the trainer holds: its agent, its session in a job, replication and retrieval of objects."""
