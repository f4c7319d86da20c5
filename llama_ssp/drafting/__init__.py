"""What proposes tokens, and on which ranks."""
