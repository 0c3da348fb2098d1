"""The style sheet and the script that every report carries inside it."""
