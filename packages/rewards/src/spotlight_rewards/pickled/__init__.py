"""Reward servers that speak pickle: flow_grpo's and verl-omni's, on this machine only."""
