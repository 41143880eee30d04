"""A language model as a judge of answers: versioned prompts, a client of any OpenAI-compatible endpoint, a cache."""
