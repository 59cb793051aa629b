"""Reinforcement learning: rollouts and group-relative policy optimisation."""
