"""Tasks: questions with known answers, and how a completion's answer is found and scored."""
