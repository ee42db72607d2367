"""Tasks: questions with known answers, extraction and scoring."""
