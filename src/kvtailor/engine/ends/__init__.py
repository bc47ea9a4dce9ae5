"""Plans under which the ends of a text stay: its first tokens and the newest."""
