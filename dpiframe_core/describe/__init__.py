"""What a person sees of a model: its text, its plan as a picture, the timeline of a request."""
