"""Workers: the processes that hold models (training engine, policy, critic, rollout)."""
