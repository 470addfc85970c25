"""The parts of `tests.bench.bench_operator`: a fleet of PPOJobs on nodes that exist only in the API server."""
