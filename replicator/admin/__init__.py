"""`replicator-admin`: the operator's command line, a gRPC client of any agent. Never imports torch."""
