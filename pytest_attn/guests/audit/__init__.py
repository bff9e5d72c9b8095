"""The audit: which of the mutants a repository's own tests let pass, and the tolerances that did."""
