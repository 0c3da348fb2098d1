"""What routing learned and what runs show: the probe, interventions, figures, the HTML report."""
