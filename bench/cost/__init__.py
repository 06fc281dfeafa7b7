"""What training costs: time, memory, start-up."""
