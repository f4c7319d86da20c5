"""Where the options of a group come from: the package's `conf`, the user's own folders, and the Hugging Face hub."""
