"""A plan before the queue: memory, step time, disk and hours of a run, from sizes, ceilings and a simulated rollout.

``python -m verl.trainer.plan`` is the program. Everything but ``calibration`` is pure and needs no torch.
"""
