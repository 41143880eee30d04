"""The published files on the Hugging Face hub: fetching, assembling, publishing."""
