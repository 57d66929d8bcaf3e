"""The rollout process: its loop, its leases, and how it resumes committed rollouts."""
