"""What a person sees on the terminal."""
