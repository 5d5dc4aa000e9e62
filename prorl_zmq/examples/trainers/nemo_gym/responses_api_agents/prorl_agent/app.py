"""NeMo Gym's agent server whose rollouts are made by prorl_zmq."""

from prorl_zmq.integrations.nemo_gym.agent import ProrlAgent

if __name__ == "__main__":
    ProrlAgent.run_webserver()
