"""Commands that start a run or read one."""
