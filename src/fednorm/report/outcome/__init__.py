"""What a comparison shows: ranks, a headline, a verdict, agreement with published numbers."""
