"""Checks and measurements that need a GPU, and the scripts for the first half hour on one."""
