"""Batch jobs that can be left alone: a file of requests in, a file of results out, resumable at any moment.

Read `runner.run` first. `inputs` reads lines, `tasks` makes requests of them, `responses` writes what came
back, `journal` keeps it on the disk, `index` knows every id without holding it in memory, `window` has a
bounded number of requests under way in an LLM. Nothing here imports jax.
"""
