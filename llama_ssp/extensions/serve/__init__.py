"""A server with OpenAI's interface: requests enter free rows of the decoder between rounds."""
