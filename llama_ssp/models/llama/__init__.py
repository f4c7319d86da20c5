"""The lean decoder of the Llama kind."""
