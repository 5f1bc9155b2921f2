"""What replicas on PostgreSQL, and processes on one port, hold and reach; see docs/scaling.md."""
