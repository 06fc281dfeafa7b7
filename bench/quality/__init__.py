"""What training comes to: losses, faults, what few bits lose."""
