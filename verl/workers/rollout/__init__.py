"""Rollout: engines, the worker that runs episodes beside one, and the manager that deals work to the workers."""
