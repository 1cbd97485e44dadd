"""`headmax serve`: continuous batching over constant states, an automatic prefix cache, and the OpenAI interface."""
