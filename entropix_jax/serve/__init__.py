"""The server: a resident engine behind the OpenAI API."""
