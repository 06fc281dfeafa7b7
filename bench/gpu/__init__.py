"""Checks and measurements that need a GPU, and the script for the first visit to one."""
