"""Schedules in model time. Needs numpy alone."""

from .simulate import Machine, Timeline, simulate

__all__ = ["Machine", "Timeline", "simulate"]
