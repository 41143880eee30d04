"""The trainer: Ray-orchestrated PPO and GRPO with sharded workers. Importing it imports nothing heavy."""
