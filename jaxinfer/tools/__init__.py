"""What stands on the engine: planner, bench, compiling ahead of time, batch jobs, evaluation."""
