"""The only room that imports nvflare: it carries packed messages, and knows nothing of what they mean."""
