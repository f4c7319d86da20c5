"""LoRA adapters (`model.adapter=`), merged into the weights of a checkpoint while they are read."""
