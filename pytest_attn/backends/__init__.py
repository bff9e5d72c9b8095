"""Subjects, who compute: the type of what is tested, the registry, and one file per library in libraries/."""
