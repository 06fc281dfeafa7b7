"""What a recipe will cost in loss, before it is trained."""
