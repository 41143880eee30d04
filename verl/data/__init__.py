"""Data on its way to the trainer: prompts, samples, packing plans and packed batches."""
