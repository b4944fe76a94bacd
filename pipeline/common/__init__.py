"""What every verb needs: progress, messages, arguments, opening models, and the figures that texts repeat."""
