"""Reinforcement-learning mathematics: pure functions over plain sequences and CPU tensors."""
