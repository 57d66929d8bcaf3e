"""Rewards: functions over pictures, and the pool that runs each in a process of its own."""
