"""What must hold of every attention kernel without any tolerance."""
