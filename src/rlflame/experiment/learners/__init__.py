"""The processes of several learners: started, watched and ended together."""
