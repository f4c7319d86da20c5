"""Better choices: warnings of a plan, changes that would fit, and searches over all that a machine can do."""
