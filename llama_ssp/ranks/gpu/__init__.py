"""What only ranks on GPUs need: waits with a deadline, a watchdog, memory for collectives, and GPUs of their own."""
