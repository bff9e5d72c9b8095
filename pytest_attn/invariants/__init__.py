"""What holds of every attention kernel."""
