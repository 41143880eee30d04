"""Rollout engines and the worker that runs episodes beside one."""
