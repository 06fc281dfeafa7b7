"""What only a GPU can show, and the scripts for the first half hour on one."""
