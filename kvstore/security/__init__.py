"""Who calls, what they may do, and what is written down about it. Rules: SECURITY.md beside this file."""
